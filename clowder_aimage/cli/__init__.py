"""The command line. Heavy modules are imported only by the verbs that need them."""
