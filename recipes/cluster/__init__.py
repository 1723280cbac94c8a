"""Jobs for 8, 64 and 512 GPUs, with predictions by a roofline and the simulator. None has run on a cluster."""
