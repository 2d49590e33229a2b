"""The tests."""

import os
import platform

if platform.machine() == "x86_64":
    # Triton's interpreter computes a tile's product with numpy. OpenBLAS's kernels for Haswell, which it takes on Zen
    # too, sum a row in another order at another place of a tile; these do not. Before numpy is imported.
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
