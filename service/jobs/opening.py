"""Settings to the queue."""

from pathlib import Path
from typing import Final

from mlcd.errors import ConfigInvalid
from service.jobs.queue import Queue
from service.jobs.sqlite import EmbeddedRecords
from service.settings import Settings

_FILE: Final = Path("jobs") / "queue.sqlite"


def open_queue(settings: Settings) -> Queue:
    """In Redis where there is one, else in the state directory. Raises ConfigInvalid where there is neither."""
    if settings.redis_url is not None:
        from service.jobs.redis import open_redis_records

        return Queue(open_redis_records(settings.redis_url.get_secret_value(), settings.jobs.redis_prefix))
    if settings.state_dir is None:
        raise ConfigInvalid("jobs have no place to be kept", remedy="set MLCD_STATE_DIR or MLCD_REDIS_URL")
    return Queue(EmbeddedRecords(Path(settings.state_dir) / _FILE))
