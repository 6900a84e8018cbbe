"""The durations of the service that are not settings, each with its purpose and reason.

The suffix is the unit: `_S` seconds, `_MS` milliseconds. `settings.py` has the durations that
operators choose.
"""

from typing import Final

# A connection
# From the connection, or from the end of an exchange, to the last header of the next request.
REQUEST_HEADERS_S: Final = 10.0
ANSWER_READ_S: Final = 10.0  # after the deadline, for a slow client to read its response
ANSWER_POLL_S: Final = 0.05  # interval at which a started response checks for room to continue
BODY_REST_S: Final = 10.0  # to receive the rest of a body after its response was sent
CROWDED_RETRY_S: Final = 1  # Retry-After while there are too many connections
BODY_PATIENCE_S: Final = 5.0  # longest pause of a client within a body
# After a client has closed its sending side, before the server checks whether the client still
# waits: most responses are ready by then.
HALF_CLOSED_S: Final = 0.15
CLIENT_POLL_S: Final = 0.05  # interval of the checks whether such a client has left

# Metrics
COLLECTIONS_SCRAPE_S: Final = 1.0  # timeout of the store of collections; scrapers wait for 10 s

# Streams of a job's events
EVENTS_POLL_S: Final = 0.5  # interval at which a stream checks for new events
EVENTS_HEARTBEAT_S: Final = 10.0  # proxies close silent streams, often after a minute
EVENTS_RETRY_MS: Final = 1000  # a browser reconnects after this

# Admission and batches
MIN_RETRY_S: Final = 1  # the shortest Retry-After, which is in whole seconds
MAX_RETRY_S: Final = 30  # the longest Retry-After
RATE_MEMORY_S: Final = 2.0  # time constant of the measured rate; older work says little
# The images of a batch end within this time, one after the other. The rate counts them together,
# because after the first image alone, the measured rate would be much too low.
BURST_S: Final = 0.1
MAX_BATCH_DELAY_S: Final = 0.002  # an idle engine waits at most this long for announced images

# The engine's process
ENGINE_BACKOFF_S: Final = 0.5  # first pause before restarting an engine that ended early
ENGINE_MAX_BACKOFF_S: Final = 15.0  # the longest of these pauses, which double
ENGINE_STEADY_S: Final = 30.0  # an engine that ran this long is restarted without a pause
ENGINE_OPEN_S: Final = 60.0  # minimum time after which a reopening engine counts as hanging
# For the largest batch at start; a batch that would take longer is extrapolated from a smaller one.
ENGINE_TRIAL_S: Final = 0.1
ENGINE_OVERDUE_S: Final = 0.8  # minimum time after which a running inference counts as overdue
ENGINE_END_S: Final = 1.0  # an idle engine ends within milliseconds, otherwise it is killed
# A success counts as recent for this time; then a trial inference runs. With ENGINE_OVERDUE_S, a
# hanging engine is noticed within 1.3 s.
READY_FRESH_S: Final = 0.5
RETIREMENT_S: Final = 1.0  # after the deadline, when a former model's requests must have ended

# For an endpoint that is away, before a batch fails: shorter than MLCD_BATCH_TIMEOUT_S, after which
# the engine would count as hanging. The service itself tries again.
ENDPOINT_WAIT_S: Final = 4.0

# Models beside the server's own
MODELS_POLL_S: Final = 5.0  # interval at which idle models are looked for
MODEL_OPEN_S: Final = 600.0  # exporting weights takes minutes; an opening that hangs ends then
MODEL_RETRY_S: Final = 5.0  # after a failed opening, whose error other requests get at once

# Triton
TRITON_LOAD_S: Final = 600.0  # building a TensorRT engine for a large model takes minutes
# Retry-After while Triton is down: the service cannot know when it will be back; its encoder checks
# four times per second.
TRITON_BACK_S: Final = 2.0
TRITON_LABELS_S: Final = 10.0  # after Triton's labels failed, the server finds labels itself
TRITON_BUSY_PAUSE_S: Final = 0.2  # before a worker's batch retries while Triton's queue is full

# The cache in Redis
CACHE_PAUSE_S: Final = 0.25  # first pause before retrying an unreachable Redis
CACHE_MAX_PAUSE_S: Final = 4.0  # the longest of these pauses, which double
CACHE_STEADY_S: Final = 30.0  # after Redis answered for this time, the pauses start from the first
# Interval at which a writer reads the memory use of Redis; writes in between may exceed the limit.
CACHE_ROOM_FRESH_S: Final = 1.0

# Keys and their rates
KEYS_POLL_S: Final = 1.0  # interval of checks of the keys file; a revoked key works until then
RATE_WINDOW_S: Final = 60  # rates are per minute
RATE_ROUNDING_S: Final = 0.01  # added to Retry-After, so that rounding makes no retry too early
RATE_REDIS_S: Final = 0.25  # timeout for counting a request in Redis
# After a failure, each server counts requests itself for this time, without Redis.
RATE_REDIS_REST_S: Final = 5.0

# The usage of keys
USAGE_FLUSH_S: Final = 5.0  # how often counts are added to their store; a crash loses so much
USAGE_CLOSE_S: Final = 1.0  # at the end, for the last counts
USAGE_REDIS_S: Final = 1.0  # to connect to Redis, and for its answer
USAGE_SQLITE_S: Final = 1.0  # for other processes that write to the file

# The queue of jobs
FIRST_PAUSE_S: Final = 4.0  # after a task's first failure, for a transient cause to end
LONGEST_PAUSE_S: Final = 60.0  # limit of the later pauses, each four times the previous one
WORKER_START_S: Final = 10.0  # before a job shows that it has no worker, as one may be starting
CLOCK_TOLERANCE_S: Final = 2.0  # more than a clock is ever slewed between two readings
CLOCK_MARGIN_S: Final = 1.0  # a time this much later than any lease was set by another clock
JOBS_COUNT_S: Final = 5.0  # interval at which a server counts the queue and removes old jobs
FILE_DRAFT_S: Final = 600.0  # an upload without data for this time counts as aborted
UPLOAD_S: Final = 3600.0  # time limit of an upload in parts
FILES_SWEEP_S: Final = 300.0  # interval at which expired files and batches are removed
BATCH_POLL_S: Final = 0.5  # interval at which a server checks for batches to start
BATCH_LONGEST_WAIT_S: Final = 30.0  # longest wait before a line refused for load is retried
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
SQLITE_TURN_S: Final = 3.0  # timeout for the write lock, which a process holds for milliseconds
SQLITE_LOG_S: Final = 60.0  # between log lines of one error, so that requests cannot fill a log
QUEUE_CONNECT_S: Final = 2.0  # timeout for connecting to the queue's Redis
QUEUE_REDIS_S: Final = 5.0  # timeout of a command; with appendfsync always it waits for the disk
QUEUE_FAILOVER_FIRST_S: Final = 0.1  # first pause before retrying a Redis that is not a primary
QUEUE_FAILOVER_S: Final = 0.7  # sum of these pauses, which double, before the queue is unreachable

# A worker
RENEWAL_S: Final = 1.0  # interval of lease renewals, by which a worker learns of a cancel
WORKER_POLL_S: Final = 0.05  # between checks of the computing thread and of signals
WORKER_IDLE_S: Final = 0.5  # between checks for work, if there was none
# For the engine's batch to end after a cancel. With the renewal before and the removal after it, a
# cancel takes less than 5 s.
WORKER_STOP_S: Final = 2.5
WORKER_DRAIN_S: Final = 7.0  # for the engine's batch to end after SIGTERM, which allows 10 s
WORKER_END_S: Final = 9.0  # after SIGTERM, when the process ends even if a thread hangs
AFTER_FAILURE_S: Final = 1.0  # after a failed task, for its cause to end
ENGINE_AWAY_S: Final = 10.0  # before retrying an engine that is down
LEFT_JOBS_POLL_S: Final = 2.0  # between checks of jobs that this worker has left to others
FOREIGN_JOBS_POLL_S: Final = 10.0  # interval at which an idle worker checks for other models' jobs
QUEUE_FIRST_WAIT_S: Final = 0.5  # first wait before retrying an unreachable queue
QUEUE_LONGEST_WAIT_S: Final = 10.0  # the longest of these waits, which double
# Time without a failure before the queue counts as back: reads succeed even on a full disk.
QUEUE_SETTLED_S: Final = 30.0

# Server processes and their end
SIGNAL_ECHO_S: Final = 0.1  # a second signal within this time is an echo, not a user's
SERVER_CLOSE_S: Final = 3.0  # to cancel remaining requests and to close everything
SERVER_OPEN_S: Final = 300.0  # a restarted process that is not open by then counts as hanging
SERVER_STEADY_S: Final = 30.0  # a server process that ran this long is restarted without a pause
SERVER_BACKOFF_S: Final = 0.5  # first pause before restarting a process that ended early
SERVER_MAX_BACKOFF_S: Final = 15.0  # the longest of these pauses, which double
SERVER_KILL_S: Final = 1.0  # after a server process should have ended, before it is killed

# Logs, metrics, traces
LOG_REST_S: Final = 0.02  # pause of the writing thread between writes, to batch lines
LOG_FLUSH_S: Final = 1.0  # for the last lines, so that a hanging reader does not delay the end
METRICS_POLL_S: Final = 0.1  # interval at which the event loop is measured and gauges are read
TRACE_EXPORT_S: Final = 3  # timeout of a collector for a batch of spans, which is then dropped
TRACE_CLOSE_S: Final = 2.0  # for the last spans, so that a hanging collector does not delay the end

# An exploration
EXPLORE_LOOK_S: Final = 0.2  # interval at which the terminal shows the progress
EXPLORE_END_S: Final = 5.0  # at the server's end, for the running batch and command to end
STEP_ERROR_S: Final = 5.0  # for the last lines of a command that has ended
ENGINE_PAUSE_S: Final = 0.2  # before work outside of requests retries an engine that is down
ENGINE_PATIENCE_S: Final = 60.0  # for such an engine to recover, before the work fails
