"""The service: gRPC around the engine, the threads that touch the disk, start and stop."""
