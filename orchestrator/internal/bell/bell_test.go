package bell

import "testing"

func TestRingWakesAllWhoWait(t *testing.T) {
	var b Bell
	b.Ring("a") // nobody waits
	one, two, other := b.Wait("a"), b.Wait("a"), b.Wait("b")
	b.Ring("a")
	<-one
	<-two
	select {
	case <-other:
		t.Error("the wrong chat was woken")
	case <-b.Wait("a"):
		t.Error("an old ring was heard")
	default:
	}
}
