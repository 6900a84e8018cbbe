"""What only one job can hold at a time: an idempotency key, and the place of its output."""

import hashlib

from mlcd.errors import Conflict
from service.jobs.database import Transaction
from service.jobs.job import FINISHED, JobSpec
from service.jobs.record import Record


def name_of_key(key: str) -> str:
    return f"key:{_digest(key)}"


def with_key(transaction: Transaction, key: str | None) -> Record | None:
    """The job that was submitted with it."""
    holder = None if key is None else transaction.holder(name_of_key(key))
    return None if holder is None else transaction.record(holder)


def check_output_free(transaction: Transaction, spec: JobSpec, *, of: str | None) -> None:
    """Raises Conflict where another job than `of` holds it."""
    if (holder := transaction.holder(_name_of_output(spec))) not in (None, of):
        raise Conflict(f"the job {holder} writes to this output", remedy="wait for it, cancel it, or name another")


def hold_output(transaction: Transaction, record: Record) -> None:
    """Until nothing is left to be done there: of a canceled job, until that is cleared away."""
    name = _name_of_output(record.spec)
    if record.state in FINISHED and record.stage != "discard":
        let_go(transaction, name, record)
    else:
        transaction.hold(name, record.id)


def let_go(transaction: Transaction, name: str, record: Record) -> None:
    """Unless another job has it by now."""
    if transaction.holder(name) == record.id:
        transaction.let_go(name)


def _name_of_output(spec: JobSpec) -> str:
    return f"output:{_digest(spec.output)}"


def _digest(text: str) -> str:
    """Names of any length and content become short ones."""
    return hashlib.sha256(text.encode()).hexdigest()
