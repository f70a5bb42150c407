"""Placement for real nodes: the cluster file, plans, the folders of each node, and the proxy's configuration."""
