"""Generated from protos/etcd by tools/gen_protos.py. Never edited."""
