"""What `hplm eval` runs: methods, tables, domains and cuts, all by one search in a folder that processes share; and int8."""
