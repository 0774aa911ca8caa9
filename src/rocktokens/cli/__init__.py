"""The command line: one verb a file. Only here do the stages of the pipeline meet."""
