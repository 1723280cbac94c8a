"""Jobs for 8, 64 and 512 GPUs, and what a roofline and the simulator predict of them. None has run on a cluster."""
