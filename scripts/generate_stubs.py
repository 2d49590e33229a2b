"""Generate ``proto/holdfast/v1/*_pb2*`` from the ``.proto`` files. Run by ``make proto``.

The generator is pinned to the oldest protobuf that is supported: stubs made by a newer one refuse to
import there.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

PROTO = Path(__file__).parent.parent / "proto"


def generate(out: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("holdfast/v1/*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", f"-I{PROTO}", f"-I{well_known}", *flags, *sources])
    if code:
        raise SystemExit(f"protoc failed with {code}")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO)
