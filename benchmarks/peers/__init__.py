"""The other sides of the comparisons. They import no shardwise: a peer runs in the interpreter that has it."""
