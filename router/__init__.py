"""The front: OpenAI HTTP, SGLang HTTP and gRPC in; pins, journal, failover; gRPC to workers out."""
