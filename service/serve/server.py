"""A server process under a supervisor.

Standard input brings one line of JSON, `Order`; standard output takes {"serving", "identity"} when it serves, or
{"error", "message", "remedy"}. The settings are read again, from where the supervisor had them: no
secret is written anywhere. The signal FINISH, and the supervisor's death, make it finish what is in flight and end.
"""

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from mlcd.errors import MlcdError
from service.host.children import heed_parent_alone
from service.host.signals import FINISH
from service.resources import Resources
from service.serve.serving import describe, identity_of, prepare_process, serve_on
from service.settings import read_settings
from service.telemetry.metrics import count_together


@dataclass(frozen=True)
class Source:
    """Where settings are read from, beside the environment. options: of the command line; file: named there."""

    options: dict[str, object]
    file: str | None


@dataclass(frozen=True)
class Order:
    """descriptor: of the listening socket. slot: 0 to processes - 1.

    together: where all processes' numbers are. identity: what must be served, None for the first to come.
    """

    source: Source
    descriptor: int
    slot: int
    together: str
    identity: str | None

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Order":
        fields = json.loads(line)
        return cls(**{**fields, "source": Source(**fields["source"])})


def main() -> None:
    heed_parent_alone(int(sys.argv[1]), at_its_end=FINISH)
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no message

    def tell(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    def serving(resources: Resources) -> None:
        tell({"serving": describe(resources), "identity": identity_of(resources)})

    line = sys.stdin.readline()
    if not line:  # the supervisor is gone
        return
    order = Order.from_json(line)
    settings = read_settings(order.source.options, file=order.source.file)
    prepare_process(settings, stops=(FINISH,))
    count_together(Path(order.together), order.slot)
    listener = socket.socket(fileno=order.descriptor)
    try:
        serve_on(
            listener,
            settings,
            announce=lambda line: click.echo(f"mlcd: {line}", err=True),
            serving=serving,
            together=Path(order.together),
            identity=order.identity,
            stops=(FINISH,),
        )
    except MlcdError as error:
        tell({"error": type(error).__name__, "message": error.message, "remedy": error.remedy})
        sys.exit(2)


if __name__ == "__main__":
    main()
