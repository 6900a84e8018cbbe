"""The durations of the service that are not settings, each with its purpose and reason.

The unit is in the name: `_S` is seconds, `_MS` milliseconds. Operators choose the durations in
`settings.py`.
"""

from typing import Final

# A connection
# From the connection, or from the end of an exchange, to the last header of the next request.
REQUEST_HEADERS_S: Final = 10.0
ANSWER_READ_S: Final = 10.0  # after the deadline, for a slow client to read its answer
ANSWER_POLL_S: Final = 0.05  # how often an answer that has begun looks for room for its next part
BODY_REST_S: Final = 10.0  # for the rest of a body that was answered before it was complete
CROWDED_RETRY_S: Final = 1  # Retry-After while there are too many connections
BODY_PATIENCE_S: Final = 5.0  # a client may pause so long within a body
# After a client has ended its side, before it is asked whether it still waits: most answers are
# ready by then.
HALF_CLOSED_S: Final = 0.15
CLIENT_POLL_S: Final = 0.05  # how often it is looked whether such a client has left

# Metrics
COLLECTIONS_SCRAPE_S: Final = 1.0  # for the store of collections; a scraper waits for 10 s

# Streams of a job's events
EVENTS_POLL_S: Final = 0.5  # how often a stream looks for new events
EVENTS_HEARTBEAT_S: Final = 10.0  # proxies close silent streams, often after a minute
EVENTS_RETRY_MS: Final = 1000  # a browser opens the next stream after this

# Admission and batches
MIN_RETRY_S: Final = 1  # the least Retry-After, which counts whole seconds
MAX_RETRY_S: Final = 30  # the longest Retry-After
RATE_MEMORY_S: Final = 2.0  # how long the measured rate remembers; older work says little
# A batch's images end one after the other within this time. The rate counts them as one: the first
# alone would make a slow engine look hopeless.
BURST_S: Final = 0.1
MAX_BATCH_DELAY_S: Final = 0.002  # an idle engine waits so long for images that are on their way

# The engine's process
ENGINE_BACKOFF_S: Final = 0.5  # the first pause before an engine that ended soon is started again
ENGINE_MAX_BACKOFF_S: Final = 15.0  # the longest of these pauses, which double
ENGINE_STEADY_S: Final = 30.0  # an engine that lived so long is replaced at once
ENGINE_OPEN_S: Final = 60.0  # opening an engine again counts as hanging after this, at the earliest
# Of the largest batch at start; of one that would take longer a part stands for the whole.
ENGINE_TRIAL_S: Final = 0.5
ENGINE_OVERDUE_S: Final = 0.8  # an inference that runs longer is in doubt, at the earliest
ENGINE_END_S: Final = 1.0  # an idle engine ends within milliseconds; one that does not is killed
# A success counts for so long; then an inference is tried. With ENGINE_OVERDUE_S, an engine that
# hangs is noticed within 1.3 s.
READY_FRESH_S: Final = 0.5
RETIREMENT_S: Final = 1.0  # after the deadline, before a model is closed: its requests have ended

# Triton
TRITON_LOAD_S: Final = 600.0  # building a TensorRT engine for a large model takes minutes
# The service cannot know when Triton will be back; its encoder looks four times a second.
TRITON_BACK_S: Final = 2.0
TRITON_LABELS_S: Final = 10.0  # after labels failed in Triton, they are found here for so long
TRITON_BUSY_PAUSE_S: Final = 0.2  # before a worker's batch tries a full queue of Triton's again

# The cache in Redis
CACHE_PAUSE_S: Final = 0.25  # before a store that does not answer is asked again
CACHE_MAX_PAUSE_S: Final = 4.0  # the longest of these pauses, which double
CACHE_STEADY_S: Final = 30.0  # a store that answered so long is asked again soon
# A writer asks Redis for its memory at most this often; what all write meanwhile may exceed the
# limit.
CACHE_ROOM_FRESH_S: Final = 1.0

# Keys and their rates
KEYS_POLL_S: Final = 1.0  # how often the keys file is checked; a revoked key works so long
RATE_WINDOW_S: Final = 60  # rates are per minute
RATE_ROUNDING_S: Final = 0.01  # added to Retry-After: at the exact moment a request comes too early
RATE_REDIS_S: Final = 0.25  # a request waits no longer to be counted
# After a failure Redis is not asked for so long: meanwhile each server counts for itself.
RATE_REDIS_REST_S: Final = 5.0

# The usage of keys
USAGE_FLUSH_S: Final = 5.0  # how often counts are added to their store; a crash loses so much
USAGE_CLOSE_S: Final = 1.0  # at the end, for the last counts
USAGE_REDIS_S: Final = 1.0  # to connect to Redis, and for its answer
USAGE_SQLITE_S: Final = 1.0  # for other processes that write to the file

# The queue of jobs
FIRST_PAUSE_S: Final = 4.0  # after a task's first failure: a passing fault is over then
LONGEST_PAUSE_S: Final = 60.0  # the longest pause after a later one; each is four times the last
WORKER_START_S: Final = 10.0  # before a job says that it has no worker: one may be about to start
CLOCK_TOLERANCE_S: Final = 2.0  # more than a clock is ever slewed between two looks at it
CLOCK_MARGIN_S: Final = 1.0  # a time so much later than any lease was set by another clock
JOBS_COUNT_S: Final = 5.0  # how often a server counts the queue and forgets old jobs
FILE_DRAFT_S: Final = 600.0  # an upload that was silent for so long has broken off
UPLOAD_S: Final = 3600.0  # from the beginning of an upload in parts to its end
FILES_SWEEP_S: Final = 300.0  # how often expired files and batches are removed
BATCH_POLL_S: Final = 0.5  # how often a server looks for batches to begin
BATCH_LONGEST_WAIT_S: Final = 30.0  # before a line that was refused for load is tried again
DAY_S: Final = 86400.0  # the unit of MLCD_JOBS__KEEP_DAYS

# Webhooks
WEBHOOK_POLL_S: Final = 1.0  # how often a server looks for events to send
WEBHOOK_JOBS_S: Final = 5.0  # how often it looks for jobs that have ended
WEBHOOK_ANSWER_S: Final = 10.0  # for a receiver to answer, with the wait for a connection to it
# After an attempt has begun, before another process sends the event: the first one has died.
WEBHOOK_LEASE_S: Final = 20.0
# After a failed attempt, before the next. A delivery is given up after 22 to 24 hours.
WEBHOOK_PAUSES_S: Final = (5, 30, 120, 600, 1800, 3600, 7200, 14400, 28800, 21600)
WEBHOOK_SECRET_S: Final = DAY_S  # an old secret still signs for so long, on request
# Deliveries that have ended are kept so long: they tell which events were sent already.
WEBHOOK_KEEP_S: Final = 7 * DAY_S
WEBHOOK_PAST_S: Final = 6 * DAY_S  # jobs that ended longer ago are not looked at; shorter than that

# Databases of the queue and of files
SQLITE_WAIT_S: Final = 0.5  # one wait of SQLite, during which no signal is handled
SQLITE_TURN_S: Final = 3.0  # for a turn to write, which each process has for milliseconds
SQLITE_LOG_S: Final = 60.0  # between log lines of one fault: requests must not fill a log
QUEUE_CONNECT_S: Final = 2.0  # to connect to the queue's Redis, before it counts as away
QUEUE_REDIS_S: Final = 5.0  # of one command: with appendfsync always it waits for the disk
QUEUE_FAILOVER_FIRST_S: Final = 0.1  # before a Redis that is not a primary is asked again
QUEUE_FAILOVER_S: Final = 0.7  # of such pauses, which double, before the queue counts as away

# A worker
RENEWAL_S: Final = 1.0  # how often a lease is renewed; a worker learns of a cancel that late
WORKER_POLL_S: Final = 0.05  # between looks at what the other thread and signals have done
WORKER_IDLE_S: Final = 0.5  # between looks for work, where there was none
# For the engine's batch to end after a cancel. With a renewal before it and the removal after it,
# a cancel takes less than 5 s.
WORKER_STOP_S: Final = 2.5
WORKER_DRAIN_S: Final = 7.0  # for the same after SIGTERM, which allows 10 s
WORKER_END_S: Final = 9.0  # after SIGTERM the process has ended, whatever hangs
AFTER_FAILURE_S: Final = 1.0  # after a failed task: its cause may be over then
ENGINE_AWAY_S: Final = 10.0  # for an engine that is away to come back
LEFT_JOBS_POLL_S: Final = 2.0  # between looks at jobs that this worker has left to others
FOREIGN_JOBS_POLL_S: Final = 10.0  # how often an idle worker looks for other models' jobs
QUEUE_FIRST_WAIT_S: Final = 0.5  # before a queue that is away is asked again
QUEUE_LONGEST_WAIT_S: Final = 10.0  # the longest of these waits, which double
# Without a failure, before the queue counts as back: reads succeed even on a full disk.
QUEUE_SETTLED_S: Final = 30.0

# Server processes and their end
SIGNAL_ECHO_S: Final = 0.1  # a second signal that a person sends comes later
SERVER_CLOSE_S: Final = 3.0  # to cancel requests that are left, and to close everything
SERVER_OPEN_S: Final = (
    300.0  # a process that takes a dead one's place and is not open by then hangs
)
SERVER_STEADY_S: Final = 30.0  # a server process that lived so long is replaced at once
SERVER_BACKOFF_S: Final = 0.5  # the first pause before one that ended soon is started again
SERVER_MAX_BACKOFF_S: Final = 15.0  # the longest of these pauses, which double
SERVER_KILL_S: Final = 1.0  # after a server process should have ended, before it is killed

# Logs, metrics, traces
LOG_REST_S: Final = 0.02  # of the thread that writes, after each time; lines gather meanwhile
LOG_FLUSH_S: Final = 1.0  # for the last lines: a reader that hangs must not delay the end
METRICS_POLL_S: Final = 0.1  # how often the event loop is measured and gauges are read
TRACE_EXPORT_S: Final = 3  # for a collector to take some spans; others are dropped
TRACE_CLOSE_S: Final = 2.0  # a collector that does not answer must not delay the end

# An exploration
EXPLORE_LOOK_S: Final = 0.2  # how often its progress is told on a terminal
EXPLORE_END_S: Final = 5.0  # at the server's end, for a batch under way and the running command
STEP_ERROR_S: Final = 5.0  # for the last lines of a command that has ended
ENGINE_PAUSE_S: Final = 0.2  # before work outside of requests asks an engine again that is away
ENGINE_PATIENCE_S: Final = 60.0  # for such an engine to come back
