"""One rank's engine: applies steps, in lockstep with the other ranks of its worker."""
