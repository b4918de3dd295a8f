"""A whole deployment in one process, repeatable by its seed: real code on a simulated clock, disk, network and lake."""
