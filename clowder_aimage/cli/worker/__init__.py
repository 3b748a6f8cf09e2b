"""Pictures and answers by a worker: this process, or one that is reached over HTTP."""
