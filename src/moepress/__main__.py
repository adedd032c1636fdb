from moepress.cli import main

main()
