"""``holdfast tune``: measure the tiles of this GPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cluster.cli.serve import config_flags
from cluster.config import load_config
from holdfast.errors import ConfigError


@click.command()
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file with the keys below")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=Path("tiles.json"),
    show_default=True,
    help="the file for `holdfast serve --tile-table`",
)
@config_flags
def tune(config_file: Path | None, output: Path, **flags: Any) -> None:
    """Measure which tiles this GPU computes a model's kernels fastest with, and write them to a file.

    The model's settings are those of `holdfast serve`: --model, --tp, --ep, --dtype, --kv-cache-dtype, --page-size.
    Takes minutes, in which the GPU should have nothing else to do. Starts no cluster. A tile is taken only if it gives
    the bits of the one that it replaces, so a file changes no token.
    """
    config = load_config(config_file, {k: v for k, v in flags.items() if v not in (None, ())})
    engine = config.engine()
    # Other commands load no torch.
    from workers.engine.rank import pick_device

    if pick_device(engine.device).type != "cuda":
        raise ConfigError("device: tiles are measured on a GPU, and this is cpu")
    from workers.engine.tuning import engine_shapes
    from workers.kernels.tile_table import write_table
    from workers.kernels.tune import table_of, tune

    shapes, device, kv_dtype = engine_shapes(engine, config.tp)
    found = []
    for best in tune(shapes, device, kv_dtype, _progress):
        found.append(best)
        click.echo(f"{best.shape}, {best.rows} rows: {best.rule_us:.1f} -> {best.us:.1f} us")
    write_table(output, device, table_of(found))
    click.echo(f"written to {output}")


def _progress(done: int, total: int) -> None:
    if done % 20 == 0 or done == total:
        click.echo(f"compiled {done} of {total} candidates")
