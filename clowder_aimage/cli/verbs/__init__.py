"""One module for each verb; a module is imported when its verb is used."""
