"""One launcher a node: it starts the ranks, agrees with the others on who is in the job, and replaces what fails."""
