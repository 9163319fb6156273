# Runs the file of SQLite's tests that is the argument. Some go on until something has happened, by numbers that are random
# otherwise: here they are the same each time.
expr {srand(1)}
set argv0 [lindex $argv 0]
set argv [lrange $argv 1 end]
source $argv0
