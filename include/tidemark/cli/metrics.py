"""``tidemark metrics``: the process that Prometheus scrapes."""

from __future__ import annotations

from typing import Annotated

import typer

from tidemark.cli.common import Consumers, connected, stderr

PORT = 9409

app = typer.Typer(help="Metrics for Prometheus.", no_args_is_help=True)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on. There is no login: the metrics name groups and topics.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = PORT,
    every: Annotated[str, typer.Option(metavar="DURATION", help="How often to ask Kafka for the ends of the topics.")] = "30s",
    consumers: Consumers = None,
) -> None:
    """Serve the lag and the work of all consumers at /metrics until it is stopped."""
    import logging

    from tidemark import project
    from tidemark.cli.lag import try_sample
    from tidemark.connections import database_url
    from tidemark.db import session
    from tidemark.metrics.serve import serve as serve_metrics
    from tidemark.spec import read_folder
    from tidemark.text.duration import parse_duration

    period = parse_duration(every)
    with connected():
        pass  # the schema is current, and the role may read it
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder, url = consumers or project.consumers(), database_url()

    def sample() -> None:
        with session(url, application="tidemark metrics") as connection:
            for problem in try_sample(connection, list(read_folder(folder)[0].values())):
                logging.getLogger(__name__).warning("lag not sampled: %s", problem)

    def ready(bound: int) -> None:
        stderr.print(f"serving http://{host}:{bound}/metrics", markup=False, highlight=False, soft_wrap=True)

    serve_metrics(url, host, port, period, sample, ready)
