"""What starts, watches and breaks a Holdfast cluster: config, supervisor, command line, demo."""
