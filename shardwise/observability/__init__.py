"""What a run reports: files for machines, a display for people, and where the seconds went. Knows nothing of
training."""

from shardwise.observability.progress import Progress, print_table
from shardwise.observability.sinks import METRICS, LogFile, RunLog, SampleLog, move_aside
from shardwise.observability.trace import Spans
