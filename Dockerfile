# Farhand in a container: the gateway by default, a node with another command.
#
#   docker build -t farhand .
#   docker run -d --name farhand -p 127.0.0.1:3210:3210 -v farhand:/data farhand
#   docker exec farhand farhand console --print
#   docker run -it --rm -v "$PWD:/work" -v farhand-node:/data farhand join CODE --id container --root /work

FROM python:3.12-slim AS build
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE CHANGELOG.md ./
COPY src src
COPY console console
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
# git, curl and procps are what commands on a node expect; bubblewrap confines them; tini reaps what they leave behind.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap curl git openssh-client procps tini \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir /wheels/*.whl \
    && rm -rf /wheels \
    && useradd --create-home --uid 1000 farhand \
    && install --directory --owner farhand --mode 0700 /data
USER farhand
WORKDIR /home/farhand
ENV FARHAND_HOME=/data
VOLUME /data
EXPOSE 3210
# Inside the container it has to listen on all addresses. Publish the port on 127.0.0.1, or let other machines in on
# purpose: connections are encrypted with a certificate in /data/tls.
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s \
    CMD ["curl", "--fail", "--silent", "--insecure", "--output", "/dev/null", "https://127.0.0.1:3210/readyz"]
ENTRYPOINT ["tini", "--", "farhand"]
CMD ["gateway", "--host", "0.0.0.0"]
