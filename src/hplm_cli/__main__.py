"""`python -m hplm_cli`: the program `hplm`."""

from hplm_cli import main

main()
