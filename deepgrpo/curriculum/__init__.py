"""Which states to roll out: pools of hard states behind one interface (`base`)."""
