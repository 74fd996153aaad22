"""What is text is escaped, once."""

from haap_rl.report.markup import Markup, element, joined, table


def test_text_is_escaped_and_markup_is_not():
    assert element("p", "a<b", element("b", "&"), None, 3) == "<p>a&lt;b<b>&amp;</b>3</p>"
    assert element("p", 'x"y', class_='"', aria_label="<", id=None) == (
        '<p class="&quot;" aria-label="&lt;">x&quot;y</p>'
    )
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'
    assert isinstance(joined("a", element("b")), Markup)


def test_coordinates_keep_one_decimal_and_counts_all_digits():
    assert element("rect", x=1.25, y=2.0, rx=123456) == '<rect x="1.2" y="2" rx="123456"></rect>'


def test_what_html_forbids_is_replaced():
    assert joined("a\0b\ud800c\x85\ufffe\n") == "a\ufffdb\ufffdc\ufffd\ufffd\n"


def test_a_table_s_numbers_stand_to_the_right():
    made = table("what <it> is", ["name", "#s"], [("a", 1.5)])
    assert "<caption><span>what &lt;it&gt; is</span></caption>" in made
    assert '<th scope="col">name</th><th class="n" scope="col">s</th>' in made
    assert '<td>a</td><td class="n">1.5</td>' in made
