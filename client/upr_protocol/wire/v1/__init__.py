"""Generated from protos/upr/v1 by tools/gen_protos.py. Never edited."""
