"""The peer port: how the nodes of a cluster find, trust and reach each other."""
