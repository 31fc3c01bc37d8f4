module berth

go 1.26

ignore (
	./groups
	./data
	./store
)
