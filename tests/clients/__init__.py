"""Other programs that serve or go on with what moepress writes, and small models that they take."""
