"""``tidemark metrics``: the process that Prometheus scrapes."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from tidemark.cli.common import print_note
from tidemark.cli.lag import try_sample
from tidemark.cli.servers import connected
from tidemark.connections import database_url
from tidemark.db import session
from tidemark.metrics.serve import serve as serve_metrics
from tidemark.spec import read_folder
from tidemark.text.duration import parse_duration

PORT = 9409
log = logging.getLogger(__name__)

app = typer.Typer(no_args_is_help=True)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on. There is no login: the metrics name groups and topics.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = PORT,
    every: Annotated[str, typer.Option(metavar="DURATION", help="How often to ask Kafka for the ends of the topics.")] = "30s",
) -> None:
    """Serve the lag and the work of all consumers at /metrics until it is stopped."""
    period = parse_duration(every)
    with connected():
        pass  # the schema is current, and the role may read it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    url = database_url()

    def sample() -> None:
        with session(url, application="tidemark metrics") as connection:
            for problem in try_sample(connection, list(read_folder()[0].values())):
                log.warning("lag not sampled: %s", problem)

    serve_metrics(url, host, port, period, sample, lambda bound: print_note(f"serving http://{host}:{bound}/metrics"))
