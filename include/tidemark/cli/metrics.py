"""``tidemark metrics``: the process that Prometheus scrapes."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from tidemark.cli.common import Consumers, connected, kafka_cluster, stderr
from tidemark.profiles import Profile

app = typer.Typer(help="Metrics for Prometheus.", no_args_is_help=True)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on. The metrics name topics and groups, so think before you open it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 9409,
    every: Annotated[str, typer.Option(metavar="DURATION", help="How often to ask Kafka for the ends of the topics.")] = "30s",
    consumers: Consumers = None,
) -> None:
    """Serve the lag and the work of all consumers at /metrics until it is stopped."""
