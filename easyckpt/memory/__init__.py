"""The memory tier: where snapshots live between the copy and the flush. The only room that touches /dev/shm."""
