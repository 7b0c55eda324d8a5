"""What runs in each rank's process: its entry, its worker with the engines, and the processes it starts."""
