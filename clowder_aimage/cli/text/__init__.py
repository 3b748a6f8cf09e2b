"""Language models on the command line: options, questions, answers."""
