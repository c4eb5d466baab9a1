//! The environment that templates see.

use super::{ChatTemplate, Error, Reply, Role, clock};

fn render(source: &str) -> Result<String, Error> {
    let template = ChatTemplate::new(source, "<s>", "</s>")?;
    template.render(&[(Role::Developer, "be brief"), (Role::User, " hi ")], Reply::Expected)
}

#[test]
fn offers_what_hugging_face_offers() {
    for (source, text) in [
        ("{{ bos_token }}{{ messages[1].content.strip() }}{{ eos_token }}", "<s>hi</s>"),
        ("{%- for m in messages %}\n{{ m['role'] }},\n{%- endfor %}", "system,user,"),
        ("{# developer #}{{ messages[0].role }}", "developer"),
        ("{% if add_generation_prompt %}\ngo{% endif %}", "go"),
        ("{{ {'a': [1, true, none, 'é<'], 'b': {}} | tojson }}", r#"{"a": [1, true, null, "é<"], "b": {}}"#),
        ("{{ [1, {'k': 2}] | tojson(indent=2) }}", "[\n  1,\n  {\n    \"k\": 2\n  }\n]"),
        ("{{ messages[1] | tojson }}", r#"{"content": " hi ", "role": "user"}"#),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% if tools %}x{% endif %}{{ messages[0].content.split(' ')[-1] }}", "brief"),
    ] {
        assert_eq!(render(source).unwrap(), text, "{source}");
    }
}

#[test]
fn tells_a_broken_template_from_refused_messages() {
    assert!(matches!(render("{% for %}"), Err(Error::Syntax(_))));
    let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert!(
        matches!(error, Error::Render(_)) && error.to_string().contains("roles must alternate"),
        "{error}"
    );
}

#[test]
fn writes_dates() {
    for (seconds, text) in [
        (0, "01 Jan 1970 Thursday 00:00:00"),
        (951_782_400, "29 Feb 2000 Tuesday 00:00:00"),
        (1_767_225_599, "31 Dec 2025 Wednesday 23:59:59"),
    ] {
        assert_eq!(clock::strftime("%d %b %Y %A %H:%M:%S", seconds).unwrap(), text);
    }
    assert!(clock::strftime("%Q", 0).is_err());
}
