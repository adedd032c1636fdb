"""The one exception that users see: a sentence that says what is wrong and what would be right."""


class MoepressError(ValueError):
    """Wrong input of any kind. The command line prints it as one line and exits with code 2."""


class UnsupportedModel(MoepressError):
    """A model, or one of its layers, that moepress does not understand; the message names the layer."""
