"""The parts that verbs share: options, results, progress."""
