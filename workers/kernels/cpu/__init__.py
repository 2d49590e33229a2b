"""The kernels of a CPU: C++, compiled once by the machine's own compiler, and run a whole step at a call."""
