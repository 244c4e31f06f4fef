"""The compiled update: rows in, optimizer steps and metrics out."""
