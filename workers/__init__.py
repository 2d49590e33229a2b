"""One rank: KV pool, session cache, model, sampler, scheduler, and the edges (gRPC, Ray) around them."""
