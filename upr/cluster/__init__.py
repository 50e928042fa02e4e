"""Cluster: servers that say by themselves who of them is active, with the help of etcd."""
