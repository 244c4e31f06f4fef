"""The decoder that the learner trains and the native engine samples from."""
