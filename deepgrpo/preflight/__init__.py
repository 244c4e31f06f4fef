"""Everything that is checked before a run starts: values and their combinations, then the inputs that they name."""
