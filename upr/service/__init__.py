"""gRPC around the engine: servicers, the threads that touch the disk, start and stop."""
