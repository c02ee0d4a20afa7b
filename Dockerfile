# One image for everything of Tidemark's: drivers, Spark's master and workers, Airflow, the broker of the compose file.
# The same lock as a checkout's, so that driver and executors agree to the byte.
FROM python:3.11-bookworm AS compiled

COPY include/tidemark/native /native
RUN python /native/build.py

FROM python:3.11-slim-bookworm

RUN apt-get update \
    && apt-get install --yes --no-install-recommends openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home tidemark \
    && install -d -o tidemark -g tidemark /opt/tidemark /opt/venv /opt/cache /var/lib/airflow /var/lib/kafka /var/lib/spark

USER tidemark
WORKDIR /opt/tidemark
ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    SPARK_HOME=/opt/venv/lib/python3.11/site-packages/pyspark \
    PYSPARK_PYTHON=/opt/venv/bin/python \
    SPARK_NO_DAEMONIZE=1 \
    TIDEMARK_HOME=/opt/tidemark \
    TIDEMARK_CACHE=/opt/cache \
    AIRFLOW_HOME=/var/lib/airflow

# As the Makefile does it: uv first, by its own hashed lines of the lock, then everything else with uv.
COPY --chown=tidemark requirements.txt ./
RUN python -m venv /opt/venv \
    && sed -n '/^uv==/,/[^\\]$/p' requirements.txt > /tmp/uv.txt \
    && pip install --no-cache-dir --require-hashes --no-deps -r /tmp/uv.txt \
    && uv pip sync --no-cache --require-hashes --compile-bytecode requirements.txt

COPY --chown=tidemark pyproject.toml README.md LICENSE ./
COPY --chown=tidemark include ./include
COPY --from=compiled /native/tidemark-*.so ./include/tidemark/native/
COPY --chown=tidemark sql ./sql
COPY --chown=tidemark spark_jobs ./spark_jobs
COPY --chown=tidemark dags ./dags
COPY --chown=tidemark plugins ./plugins
COPY --chown=tidemark docker ./docker
RUN uv pip install --no-cache --no-deps --no-build-isolation --editable . \
    && python -c "from tidemark.jvm.jars import spark_jars; spark_jars(print)"

CMD ["tidemark", "--help"]
