"""The engine: synchronous and deterministic. No gRPC, clock, randomness or I/O inside; they are handed in."""
