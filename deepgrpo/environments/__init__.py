"""What a student can talk to between its turns, such as a search engine or an interpreter: see `base`."""
