package forward

// Placeholder stands where a client insists on a key. The gateway takes it out
// and puts the real one in.
const Placeholder = "placeholder"

// Environ returns what an engine with a model, and its tools, need in their
// environment to find the gateway at address: the providers, and a proxy for
// everything else. Nothing in it is secret.
func Environ(address string) []string {
	gateway := "http://" + address
	const direct = "127.0.0.1,localhost"
	return []string{
		"ANTHROPIC_BASE_URL=" + gateway + "/anthropic",
		"ANTHROPIC_API_KEY=" + Placeholder,
		"OPENAI_BASE_URL=" + gateway + "/openai/v1",
		"OPENAI_API_KEY=" + Placeholder,
		"GOOGLE_GEMINI_BASE_URL=" + gateway + "/gemini",
		"GEMINI_API_KEY=" + Placeholder,
		// Programs disagree on the case.
		"HTTP_PROXY=" + gateway, "http_proxy=" + gateway,
		"HTTPS_PROXY=" + gateway, "https_proxy=" + gateway,
		"NO_PROXY=" + direct, "no_proxy=" + direct,
		"NODE_USE_ENV_PROXY=1", // or Node's own fetch ignores them
	}
}
