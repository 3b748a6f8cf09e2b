"""The checks of ``aimage doctor``: of this installation, this machine and its connections."""
